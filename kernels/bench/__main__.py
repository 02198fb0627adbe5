"""python -P -m hopper_sol.kernels.bench"""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())

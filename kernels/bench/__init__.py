"""Speed of the ops, each number behind a parity gate.

    python -P -m hopper_sol.kernels.bench OP [options]      where the pack is installed
    python kernels/bench/run.py OP [options]                from a checkout, whatever its folder is called
    ... bench report [--check]                              committed results -> BENCHMARKS.md

Options take comma lists and may be repeated; all combinations are measured in one process:

    ... bench sol_attention --case wan14b-480p --backend triton,peer:fa4 --precision bf16,fp8 \
        --generator iid --tau 0.5,1.0 --json OUT.json --time-limit 300
    ... bench --plan PLAN.json --json OUT.json

A plan is a JSON list of objects whose keys are the options: {"op": "sol_attention", "case":
["wan14b-480p"], "density": [0.16], "backend": ["triton", "peer:kitchen"]}. --list prints ops,
cases, options, backends and peers.

Method. Every backend and peer of one job (case, generator, tau, ...) gets the same inputs, which are
never zeros. Each is first compared by value with the PyTorch reference; one that fails gets no
times. Then all that passed are timed in turn, one launch each per round, so that a drift of the
clock hits them alike. Before every timed launch a 256 MB buffer is written a few times: L2 is cold,
and the GPU is busy while the host enqueues, as inside a model. Times are CUDA events; a row has the
median, both quartiles and the number of rounds. On a CPU the same path runs with a wall clock, which
is for tests.

Adding an op: a file in ops/ and a line in ops/__init__.py. Adding a peer: a file in peers/ (or an
entry in one) and a line in peers/__init__.py.
"""

"""The one error of building a kernel."""


class KernelBuildError(RuntimeError):
    """A kernel can't be compiled or loaded here.

    Attributes:
        kernel: its name.
        what: "compile", "load" or "find the compiler of".
        reason: what went wrong.
        advice: what to do.
    """

    def __init__(self, kernel: str, what: str, reason: str, advice: str):
        self.kernel = kernel
        self.what = what
        self.reason = reason.strip()
        self.advice = advice
        # A report shows the first line only, and the texts of compilers are long.
        first, _, rest = self.reason.partition("\n")
        super().__init__(f"can't {what} {kernel}: {first.strip()}; {advice}\n{rest}".strip())

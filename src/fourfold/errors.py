"""The one exception that the commands and the engine turn into a message for the user."""

from __future__ import annotations


class FourfoldError(Exception):
    """A promise that cannot be kept, or an input that cannot be used.

    The message always has three parts: what happened, why, and what to do about it.  Commands print it
    without a traceback and exit with code 2; inside the engine it stops the start.
    """

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        self.what, self.why, self.fix = what, why, fix
        text = what if what.endswith((".", "?", "!")) else what + "."
        if why:
            text += f" Why: {why.rstrip('.')}."
        if fix:
            text += f" What to do: {fix.rstrip('.')}."
        super().__init__(text)

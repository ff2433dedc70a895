"""What the command lines share: consoles, and errors told in one paragraph."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console

from smcp_fx.errors import SmcpError


def consoles() -> tuple[Console, Console]:
    """Return the consoles for results (stdout) and for problems (stderr)."""
    return (
        Console(highlight=False, soft_wrap=True, emoji=False),
        Console(stderr=True, highlight=False, soft_wrap=True, emoji=False),
    )


def guarded(
    command: str,
    run: Callable[[], int],
    problems: Console,
    *,
    debug: bool,
    interrupted: str = "",
    advice: str = "Free space, or give another place.",
) -> int:
    """Run a command; tell what goes wrong in one paragraph and return the exit code.

    With ``debug`` errors are raised as they are. ``interrupted`` is added to the word on Ctrl-C, ``advice`` to
    what the operating system refuses.
    """
    try:
        return run()
    except KeyboardInterrupt:
        problems.print(f"\nInterrupted. {interrupted}".rstrip())
        return 130
    except SmcpError as error:
        if debug:
            raise
        problems.print(f"[red]{command}:[/red] {escaped(error)}", markup=True)
        return error.exit_code
    except OSError as error:
        if debug:
            raise
        what = f"{error.strerror or error}: {error.filename or ''}"
        problems.print(f"[red]{command}:[/red] {escaped(what)}. {advice}", markup=True)
        return 2


def escaped(message: object) -> str:
    """Return a message as one line of text that rich prints as it is."""
    return " ".join(str(message).split()).replace("[", "\\[")

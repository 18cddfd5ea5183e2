"""The errors a user sees as one clear text instead of a traceback, each with its exit status.

They stand below every folder, so that any of them may be raised anywhere. All take one message and
nothing else, so that they survive pickling on their way from a worker to the driver.
"""


class FoxrayError(Exception):
    """A failure with a text for people; the command line prints it and exits with `exit_status`."""

    exit_status = 1


class UserError(FoxrayError):
    """The user's mistake: the message names the file, the value seen, what is allowed and the next step."""

    exit_status = 2


class MemoryExhausted(FoxrayError):
    """Memory ran out and everything that the policy allows has been tried."""

    exit_status = 3

"""What becomes of exceptions that have been dealt with."""


def forget_frames(error: BaseException) -> None:
    """Removes the tracebacks of an exception and of all exceptions that led to it.

    A traceback refers to frames, whose variables often refer, by way of a request or a task, to the exception: a cycle
    of 5 to 15 kB, which only a full garbage collection frees.
    """
    kept = [error]
    while kept:
        one = kept.pop()
        kept += [origin for origin in (one.__cause__, one.__context__) if origin is not None]
        if isinstance(one, BaseExceptionGroup):
            kept += one.exceptions
        one.__traceback__ = one.__cause__ = one.__context__ = None

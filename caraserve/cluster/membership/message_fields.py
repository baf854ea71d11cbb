"""Types of the fields of messages, with bounds that msgspec checks when it decodes them."""

from typing import Annotated

from msgspec import Meta

MAX_NAME, MAX_ADDRESS = 64, 256  # characters
# Printable ASCII without quote and backslash: one byte each in JSON, so that the largest message fits into a frame.
PLAIN = r"\A[ !#-\[\]-~]*\Z"

Count = Annotated[int, Meta(ge=0, lt=2**62)]
Integer = Annotated[int, Meta(gt=-(2**62), lt=2**62)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME, pattern=PLAIN)]
NameOrEmpty = Annotated[str, Meta(max_length=MAX_NAME, pattern=PLAIN)]
Address = Annotated[str, Meta(max_length=MAX_ADDRESS, pattern=PLAIN)]  # HOST:PORT; `decode` checks the form

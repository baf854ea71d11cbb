"""What texts from outside may be."""


def is_text(value: str) -> bool:
    """Returns whether a text can be written as UTF-8: JSON and pickles may have half a pair of surrogates, of which no
    response could be made."""
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)

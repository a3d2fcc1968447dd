"""The word on every output that a rule with another law than the target's has touched."""


def labelled(text: str, lossy: bool) -> str:
    """The text, and LOSSY behind it where it must stand there."""
    return f"{text}, LOSSY (rule typical)" if lossy else text

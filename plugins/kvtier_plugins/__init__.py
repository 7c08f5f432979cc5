"""What the plugins share. It imports no engine."""


class Unsupported(ValueError):  # noqa: N818
    """kvtier cannot keep this engine's cache. The engine works without kvtier, and one warning is logged."""

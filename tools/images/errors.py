"""The error of everything that makes an image."""


class ImageError(RuntimeError):
    """An image cannot be built or read; the message says why and what to do."""

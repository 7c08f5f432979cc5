"""Codecs, which convert a block to the payload of a frame and back, and the frame format."""

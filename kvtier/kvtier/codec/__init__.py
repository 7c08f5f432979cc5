"""What turns the bytes of a block into a frame's payload and back, one codec a file; and the frame itself."""

"""What a mover does, one matter a file: writing, bringing away, forgetting, a budget."""

"""What commands do by themselves, beside a daemon or without one: nothing that serves imports any of it."""

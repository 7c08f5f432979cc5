"""The work of commands. The serving parts never import it."""

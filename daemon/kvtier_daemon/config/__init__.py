"""The configuration: its schema, its sources, the values in force, and checks of the machine."""

"""Connectors: they move prompts between the arenas of engines. ``base`` has the interface."""

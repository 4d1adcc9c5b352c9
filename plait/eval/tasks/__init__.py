"""Conversations of each kind, drawn at random on one side of the split."""

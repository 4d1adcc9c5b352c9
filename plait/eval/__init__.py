"""The accuracy gate: held-out questions, exact answers, and statistics that say what a difference means."""

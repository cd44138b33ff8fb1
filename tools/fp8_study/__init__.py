"""What `tools/fp8_phase.py` is made of: the trainings, the errors of phases, and what is drawn and printed of both."""

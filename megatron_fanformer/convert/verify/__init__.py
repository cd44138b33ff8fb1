"""Verification of a conversion: its receipt, and the models of all formats."""

"""What a conversion is held to: its receipt, and the models of all formats run a layer at a time."""

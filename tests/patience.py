"""How long a test waits for what must happen: only what never happens takes longer, however busy the machine is."""

PATIENCE_SECONDS = 900.0

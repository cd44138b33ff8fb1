"""The verb `plan`: memory, time and cost on many GPUs by formula, the fastest layout, a simulated rank."""

"""What a run needs before anything is paid for: processes, memory, price and time."""

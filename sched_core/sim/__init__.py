"""The simulator: an event heap and a cost model around the same policies that drive live jobs."""

"""`turnkeeper demo`: conversations run by workers that are killed all the time, and the proof that nothing went twice."""

"""The model/tool loop on a turn log: wire types, ports, tools, the loop and what it gives back."""

"""Commands about prices, traces and simulation: no run is needed."""

"""The process beside each engine: dials out, relays tokens, holds nothing that cannot be lost. No torch."""

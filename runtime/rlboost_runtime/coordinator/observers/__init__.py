"""What is measured and reported of a run: its timeline, wasted time, boot times and step figures.

Observers (`driver.totals.Observer`) get events after the core has decided; a run goes on without them.
"""

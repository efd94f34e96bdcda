"""The core's driver: events go in, the core's commands come out and are carried out.

Enter at `core_driver`. It owns the one clock and the order of events. Imported by the coordinator's other
rooms, never the other way round.
"""

"""How much of the time is useful where something fails in every fifth step?"""

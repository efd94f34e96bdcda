"""Does the policy learn, and does it learn the same while its machines are killed?"""

"""A cloud on one machine: moto's EC2 API whose instances are network namespaces with a real sshd.

`python -m cloudlab FOLDER` serves it; `client.Lab` starts and steers that from a test. Needs root on Linux.
"""

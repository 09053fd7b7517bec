"""The audit: is this the hardware that was paid for, and is it healthy?"""

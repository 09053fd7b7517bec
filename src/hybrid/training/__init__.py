"""Training: a corpus becomes a published base, and a base becomes published adapters."""

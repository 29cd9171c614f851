"""A byte-level GPT learns from real text, offloaded and not, and every loss and weight is compared.

Reading order: ``settings`` (what was asked), ``text``, ``model`` and ``training`` (what is learnt, and how),
``baselines`` (the two yardsticks), ``machine`` (real or simulated device), ``probe`` and ``memory`` (peaks,
measured and predicted), ``runs`` (the three runs), ``report`` and ``tables`` (what they say), ``command``.
"""

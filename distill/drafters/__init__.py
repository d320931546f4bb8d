"""How each kind of drafter is prepared, trained and saved: one file a kind (base.py)."""

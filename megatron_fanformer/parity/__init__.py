"""The proof that every parallel layout trains the same model, on a user's own configuration made small."""

"""The papers' arguments on the smallest things that show them: tables without a model, and a model of one layer."""

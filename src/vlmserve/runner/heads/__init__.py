"""Results of tasks that generate no tokens."""

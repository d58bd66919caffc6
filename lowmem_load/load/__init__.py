"""What users call to load and plan, and the stages of a load: describe, plan, prove, execute."""

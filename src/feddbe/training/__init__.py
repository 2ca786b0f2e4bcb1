"""How a client trains: what is to be trained is a `FitPlan`, and trainers carry it out."""

"""What results say: several runs in one table, the aims, the tables of the docs, pictures."""

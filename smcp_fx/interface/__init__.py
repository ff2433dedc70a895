"""What users see of a model beside its graph: how it is called, its outputs, attributes and modes."""

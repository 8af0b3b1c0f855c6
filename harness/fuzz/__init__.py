"""Campaigns that go on for as long as they are given: rounds of scenarios of several kinds, spread over processes."""

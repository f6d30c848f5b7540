"""Figures and the one-file page that shows them; knows data, not models."""

from wellposed.reporting.page import Section as Section
from wellposed.reporting.page import page as page
from wellposed.reporting.panels import Curves as Curves
from wellposed.reporting.panels import Line as Line
from wellposed.reporting.panels import curves_figure as curves_figure
from wellposed.reporting.panels import heat_panel as heat_panel
from wellposed.reporting.panels import image_panel as image_panel
from wellposed.reporting.panels import line_panel as line_panel
from wellposed.reporting.text import markdown_table as markdown_table
from wellposed.reporting.text import text_table as text_table

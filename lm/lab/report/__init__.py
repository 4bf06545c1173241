"""What every page is made of: templates with autoescape, a style sheet, how figures look.

In: numbers, text, figures. Out: strings of HTML, Markdown and SVG.
Imports lm.system; jinja2 and matplotlib, not torch.
"""

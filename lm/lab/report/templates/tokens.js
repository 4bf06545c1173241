// Tokens as text and the candidates for each: what the page of runs and the page of a model share. A text is only ever
// text: it reaches the page as textContent.
"use strict";
const $ = (id) => document.getElementById(id);
const percent = (share) => (share > 0 && share < 5e-4 ? "<0.1 %" : `${(100 * share).toFixed(1)} %`);
const quoted = (text) => JSON.stringify(text);

function el(tag, { style = {}, ...properties } = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  Object.entries(style).forEach(([name, value]) => element.style.setProperty(name, value));
  element.append(...children);
  return element;
}

// One stop of the tab key for all elements that match; two keys move between them, a third one calls leave(element).
function roving(box, selector, [previous, next, other], leave = () => {}) {
  box.addEventListener("keydown", (event) => {
    const all = [...box.querySelectorAll(selector)], here = all.indexOf(event.target.closest(selector));
    const target = all[here + { [previous]: -1, [next]: 1 }[event.key]];
    if (here < 0 || !(target || event.key === other)) return;
    event.preventDefault();
    if (event.key === other) leave(all[here]);
    else target.focus();
  });
  box.addEventListener("focusin", (event) => {
    if (!event.target.matches(selector)) return;
    box.querySelectorAll(`${selector}[tabindex="0"]`).forEach((element) => { element.tabIndex = -1; });
    event.target.tabIndex = 0;
  });
  return box;
}

// --- colours

const faded = (color, share) => `color-mix(in srgb, ${color} ${Math.round(50 * Math.min(1, Math.max(0, share)))}%, transparent)`;
const unsure = (lead) => 1 - lead / 5; // 0: the token's logit lies 5 or more above the best logit of all others

function scale(low, high, color) { // what the colours say
  const bar = el("i", { style: { background: `linear-gradient(90deg, ${faded(color, 0)}, ${faded(color, 1)})` } });
  return el("span", { className: "scale" }, low, bar, high);
}

// --- tokens

// view: {show, chosen, enter}. show(row) is called for the token that is pointed at or chosen, by a click or the arrow
// keys; when the pointer leaves, for the chosen one. enter() is called by the key Enter.
function tokenBox(name, view) {
  const box = roving(el("div", { className: "tokens", role: "group", ariaLabel: name }), ".token", ["ArrowLeft", "ArrowRight", "Enter"], () => view.enter?.());
  box.addEventListener("mouseover", ({ target }) => target.closest(".token") && view.show(target.closest(".token").row));
  box.addEventListener("mouseleave", () => view.chosen && view.show(view.chosen));
  box.addEventListener("focusin", ({ target }) => choose(view, target.row));
  return box;
}

function choose(view, row) {
  view.chosen?.span.classList.remove("chosen");
  row.span.classList.add("chosen");
  view.chosen = row;
  view.show(row);
}

function addToken(box, row) {
  const parts = row.text.split("\n").flatMap((part, i) => (i ? [el("i"), `\n${part}`] : part ? [part] : [])); // <i>: a sign
  row.span = el("span", { className: "token", tabIndex: box.querySelector(".token") ? -1 : 0, row }, ...parts);
  box.append(row.span);
}

// --- candidates

// rows: {label, share, after, value, color, marked, cut, press}; a bar for the share, a line below it for `after`.
function bars(rows, back) {
  const width = (share) => `${100 * Math.min(1, Math.max(0, share))}%`;
  const item = ({ label, share, after = 0, value, color, marked, cut, press }, i) => {
    const style = { "--bar": faded(color, 0.7), "--colour": color, "--share": width(share), "--after": width(after) };
    const className = `bar${marked ? " marked" : ""}${cut ? " cut" : ""}`, parts = [el("code", {}, label), el("span", {}, value)];
    const button = () => el("button", { type: "button", className, style, tabIndex: i ? -1 : 0, onclick: press }, ...parts);
    return el("li", {}, press ? button() : el("div", { className, style }, ...parts));
  };
  const list = el("ol", { className: "bars" }, ...rows.map(item));
  return roving(list, "button", ["ArrowUp", "ArrowDown", "Escape"], back);
}

// candidates: [{token, text, label, share, drawn}], before and after the settings of sampling. pick(text) goes on with
// one; a part of a character cannot be typed.
function candidateBars({ token, candidates }, { color, sampled, pick, back }) {
  const value = ({ share, drawn }) => percent(share) + (!sampled ? "" : drawn > 0 ? ` → ${percent(drawn)}` : ", cut off");
  return bars(candidates.map((candidate) => ({
    label: quoted(candidate.label), share: candidate.share, after: sampled ? candidate.drawn : 0, value: value(candidate), color,
    marked: candidate.token === token, cut: sampled && !(candidate.drawn > 0), press: candidate.text && !candidate.text.includes("\ufffd") ? () => pick(candidate.text) : null,
  })), back);
}

// A candidate that is picked goes into the prompt. The prompts before it can be taken back.
const branch = {
  before: [],
  pick(field, prompt) {
    this.before.push(field.value);
    field.value = prompt;
  },
  takeBack(field) { field.value = this.before.pop() ?? field.value; },
  clear() { this.before = []; },
};

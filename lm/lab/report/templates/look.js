const VIEWS = ["prompt", "attention", "text", "runs"];
const POLL = 2000; // milliseconds
const GONE = "The program does not answer; it may have been ended in its terminal.";
const DASHES = { "-": "", "--": "6 3", "-.": "6 3 1 3", ":": "2 3" };
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const grouped = (value) => value.toLocaleString("en");
const fixed = (value, digits = 3) => (value === null || value === undefined ? "" : value.toFixed(digits));
let runs = []; // as GET /runs gives them
let labels = new Map(); // of the names of runs
let continued = null; // of the prompt: {names, asked, same_tokenizer, steps: a list of rows for each model, boxes, chosen, show}
let scored = null; // of the text: the answer of POST /text, with names
let attended = []; // of the attention: a state for each model
let streaming = null; // what aborts the stream
const answered = new Set(); // views that show the answer for the chosen models

const color = (name) => runs.find((run) => run.name === name)?.color ?? "var(--ink)";
const short = (name) => labels.get(name) ?? name;
const swatch = (name) => { // in its colour and with its dashes, as in a chart
  const stroke = { style: { stroke: color(name) }, "stroke-dasharray": DASHES[runs.find((run) => run.name === name)?.dashes ?? "-"] };
  const box = shape("svg", { class: "swatch", viewBox: "0 0 24 10", "aria-hidden": true });
  box.append(shape("line", { x2: 24, y1: 5, y2: 5, "stroke-width": 4, ...stroke }));
  return box;
};
const heading = (name) => el("h2", { title: name }, swatch(name), short(name));
const unknown = () => el("p", { className: "soft" }, "The training text is not at hand, so nothing is known of frequencies.");

// Names without what all have in common and without the hash at their end, where they stay apart.
function shortened(names) {
  const words = names.map((name) => name.split(/[-/]/));
  const isCommon = (word) => names.length > 1 && words.every((list) => list.includes(word));
  const kept = words.map((list) => list.filter((word) => !isCommon(word) && !/^[0-9a-f]{8,10}$/.test(word)).join("-"));
  return new Map(names.map((name, i) => [name, kept[i] && kept.indexOf(kept[i]) === kept.lastIndexOf(kept[i]) ? kept[i] : name]));
}

// --- questions

async function post(route, question, signal) {
  const response = await fetch(route, { method: "POST", signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(question) });
  if (!response.ok) throw new Error((await response.json()).error);
  return response;
}

async function* streamed(route, question, signal) {
  const reader = (await post(route, question, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    yield* lines.map((line) => JSON.parse(line));
  }
}

// The names of the chosen models; the fields of a form with them, without those that are empty.
const chosen = () => [...new Set([$("first").value, $("second").value].filter(Boolean))];
function question(form) {
  const fields = [...form.elements].filter((field) => field.name && (field.type !== "number" || field.value !== ""));
  return { runs: chosen(), ...Object.fromEntries(fields.map((field) => [field.name, field.type === "number" ? field.valueAsNumber : field.value])) };
}

const ANSWERS = { prompt: continuePrompt, attention: showAttention, text: scoreText };

async function ask(view, ...rest) {
  const form = $(`${view}-form`);
  $("message").textContent = "";
  form.ariaBusy = "true";
  answered.add(view);
  keepAddress();
  try { await ANSWERS[view](form, ...rest); }
  catch (error) { if (error.name !== "AbortError") $("message").textContent = error.message; }
  form.ariaBusy = "false";
}

// --- prompt

async function continuePrompt(form) {
  streaming?.abort();
  const names = chosen(), own = (streaming = new AbortController());
  const asked = { ...question(form), forced: branch.forced, of: Math.min(branch.of ?? 0, names.length - 1) };
  const state = (continued = { names, asked, same_tokenizer: true, parted: false, steps: names.map(() => []), chosen: null });
  state.show = (row) => showStep(state, row);
  state.enter = () => $("step").querySelector("button.bar")?.focus();
  state.boxes = names.map((name) => tokenBox(`Text of ${short(name)}`, state));
  state.boxes.forEach((box) => box.append(el("span", { className: "soft" }, asked.prompt)));
  $("continuations").replaceChildren(...names.map((name, i) => el("div", {}, heading(name), state.boxes[i])));
  $("parting").textContent = "";
  $("step").hidden = true;
  $("stop").hidden = false;
  $("back").hidden = !branch.forced.length;
  showPromptScale();
  try { for await (const row of streamed("/prompt", asked, own.signal)) addStep(state, row); }
  finally { if (streaming === own) $("stop").hidden = true; }
}

function addStep(state, row) {
  if (row.error) throw new Error(row.error);
  if ("same_tokenizer" in row) state.same_tokenizer = row.same_tokenizer;
  if (row.end) $("message").textContent = row.end;
  if ("end" in row) endSteps(state);
  if (!("model" in row)) return;
  const steps = state.steps[row.model];
  row.index = steps.length;
  row.start = steps.at(-1)?.stop ?? 0;
  row.stop = row.start + row.text.length;
  steps.push(row);
  addToken(state.boxes[row.model], row);
  paintStep(state, row);
  const n = state.asked.forced.length, isOwn = row.model === state.asked.of;
  if (n && isOwn && row.index === n - 1) row.span.classList.add("picked");
  const [model, at] = numbers(restored.get("at")) ?? [state.asked.of, n ? n - 1 : row.lead < 1 ? row.index : -1];
  if (!state.chosen && row.model === model && row.index === at) choose(state, row); // at first, the first uncertain token
  if (n && state.chosen === row && document.activeElement === document.body) row.span.focus({ preventScroll: true });
  if (!state.parted) markParting(state);
  if (state.chosen && state.chosen !== row && row.index === state.chosen.index) state.show(state.chosen); // beside it
}

function endSteps(state) {
  const rows = state.steps[state.asked.of];
  if (!state.chosen && rows.length) choose(state, rows.reduce((least, row) => (row.lead < least.lead ? row : least)));
  if (state.steps.length > 1 && !state.parted) $("parting").textContent = "They agree to the end.";
  restored.delete("at");
}

function paintStep(state, row) {
  const share = $("prompt-colour").value === "rank" ? 1 - 1 / row.rank : unsure(row.lead);
  row.span.style.background = faded(color(state.names[row.model]), share);
}

function showPromptScale() {
  const name = continued.names[0], greedy = !continued.asked.temperature;
  const isRank = $("prompt-colour").value === "rank";
  const bar = isRank ? scale("rank 1", "far behind", color(name)) : scale("sure: 5 ahead", "unsure: level or behind", color(name));
  $("prompt-scale").replaceChildren(isRank && greedy ? "At temperature 0 each token has rank 1, so nothing is coloured." : bar);
}

// By tokens, or by text if the tokenizers differ.
function markParting(state) {
  const [a, b] = state.steps;
  if (!b) return;
  let pair;
  if (state.same_tokenizer) pair = [a, b].map((rows) => rows.find((row, k) => k < a.length && k < b.length && a[k].token !== b[k].token));
  else {
    const [left, right] = [a, b].map((rows) => rows.map((row) => row.text).join(""));
    const length = [...Array(Math.min(left.length, right.length)).keys()].find((k) => left[k] !== right[k]);
    pair = [a, b].map((rows) => rows.find((row) => row.stop > length));
  }
  if (!pair[0] || !pair[1]) return;
  state.parted = true;
  pair.forEach((row) => row.span.classList.add("parts"));
  $("parting").textContent = `They part at token ${pair[0].index + 1}, where the bar is; from there on they continue different texts.`;
}

function showStep(state, row) {
  const rows = state.steps.map((steps) => (state.same_tokenizer ? steps[row.index] : steps.findLast((other) => other.start <= row.start)));
  rows[row.model] = row;
  $("step").replaceChildren(el("div", { className: rows.length > 1 ? "pair" : "" }, ...rows.map((shown) => (shown ? candidateList(state, shown) : ""))));
  $("step").hidden = false;
  if (row === state.chosen) keepAddress();
}

function candidateList(state, row) {
  const { model, index, label, rank, lead } = row, before = state.steps[model].slice(0, index);
  const pick = (token) => {
    branch.pick([...before.map((step) => step.token), token]);
    branch.of = model;
    document.activeElement.blur();
    ask("prompt");
  };
  const look = () => {
    $("attention-form").elements.text.value = state.asked.prompt + before.map((step) => step.text).join("") + row.text;
    answered.delete("attention");
    restored.delete("attention-at");
    show("attention");
  };
  const facts = `token ${index + 1}: ${quoted(label)}, rank ${rank}, lead ${fixed(lead, 2)}`;
  const options = { color: color(state.names[model]), sampled: state.asked.temperature > 0, pick, back: () => state.chosen?.span.focus() };
  const button = el("button", { type: "button", className: "link", onclick: look }, "attention");
  return el("div", {}, heading(state.names[model]), el("p", { className: "soft" }, `${facts}; `, button), candidateBars(row, options));
}

// --- attention

async function showAttention(form) {
  const { text, runs: names } = question(form);
  const places = taken("attention-at") ?? [];
  const columns = (attended = names.map((name, i) => ({ name, text, head: places[2 * i + 1] ?? -1, chosen: null, column: el("div") })));
  for (const state of columns) {
    state.show = (row) => (row === state.chosen ? attend(state, row.index) : showWeight(state, row));
    state.enter = () => state.column.querySelector(".heads [tabindex='0']")?.focus();
  }
  $("attentions").replaceChildren(...columns.map((state) => state.column));
  for (const [i, state] of columns.entries()) await attend(state, places[2 * i] ?? null);
}

async function attend(state, position) {
  if (position !== null && position === state.position) return paintAttention(state);
  const answer = await (await post("/attention", { runs: [state.name], text: state.text, position })).json();
  const isFirst = !state.tokens;
  Object.assign(state, { position: answer.position, weights: answer.weights.flat() });
  state.names = answer.weights.flatMap((layer, i) => layer.map((_, k) => `layer ${i + 1}, head ${k + 1}`));
  if (isFirst) {
    state.tokens = answer.tokens.map((token, index) => ({ ...token, index }));
    const box = tokenBox(`Text of ${short(state.name)}`, state);
    state.tokens.forEach((row) => addToken(box, row));
    state.heads = roving(el("div", { className: "heads", role: "group", ariaLabel: "Heads" }), "button", ["ArrowUp", "ArrowDown", "Escape"], () => state.chosen?.span.focus());
    state.detail = el("div");
    state.column.append(heading(state.name), box, state.detail, state.heads);
    state.chosen = state.tokens[state.position];
    state.chosen.span.classList.add("chosen");
  }
  drawHeads(state);
  paintAttention(state);
}

const headWeights = ({ head, weights }) => (head >= 0 ? weights[head] : weights[0].map((_, s) => weights.reduce((sum, row) => sum + row[s], 0) / weights.length));

function drawHeads(state) {
  const press = (head) => () => { state.head = head; drawHeads(state); paintAttention(state); state.heads.children[head + 1].focus(); };
  const rows = ["mean of all", ...state.names].map((name, i) => {
    const canvas = el("canvas", { width: state.tokens.length, height: 1, role: "img", ariaLabel: "" });
    requestAnimationFrame(() => drawStrip(canvas, headWeights({ ...state, head: i - 1 }), color(state.name)));
    return el("button", { type: "button", tabIndex: i - 1 === state.head ? 0 : -1, ariaPressed: String(i - 1 === state.head), onclick: press(i - 1) }, name, canvas);
  });
  state.heads.replaceChildren(...rows);
}

function drawStrip(canvas, shares, ink) {
  const context = canvas.getContext("2d");
  canvas.style.color = ink;
  context.fillStyle = getComputedStyle(canvas).color;
  const most = Math.max(...shares);
  shares.forEach((share, i) => { context.globalAlpha = share / most; context.fillRect(i, 0, 1, 1); });
}

function paintAttention(state) {
  const shares = headWeights(state), most = Math.max(...shares), ink = color(state.name);
  state.tokens.forEach(({ span }, i) => {
    span.style.background = faded(ink, i < shares.length ? shares[i] / most : 0);
    span.classList.toggle("unseen", i > state.position);
  });
  const order = [...shares.keys()].sort((a, b) => shares[b] - shares[a]).slice(0, 5);
  const name = state.head < 0 ? "the mean of all heads" : state.names[state.head];
  const rows = order.map((i) => ({ label: quoted(state.tokens[i].label), share: shares[i], value: percent(shares[i]), color: ink }));
  const facts = el("p", { className: "soft" }, `Token ${state.position + 1} of ${state.tokens.length}, ${quoted(state.chosen.label)}, in ${name}:`);
  state.detail.replaceChildren(facts, bars(rows), scale("0", percent(most), ink));
  keepAddress();
}

function showWeight(state, { index, label }) {
  const share = headWeights(state)[index];
  state.detail.firstChild.textContent = share === undefined ? `${quoted(label)} comes later and is not seen.` : `${percent(share)} goes to token ${index + 1}, ${quoted(label)}.`;
}

// --- text

async function scoreText(form) {
  const asked = question(form);
  const answer = await (await post("/text", { ...asked, passage: (asked.passage ?? 1) - 1 })).json();
  const isOther = scored?.names.length !== asked.runs.length;
  scored = { ...answer, names: asked.runs, chosen: null, show: showToken };
  const options = [...$("text-colour").options], both = scored.names.length > 1;
  scored.names.forEach((name, i) => { options[i].textContent = `loss of ${short(name)}`; });
  options.slice(1).forEach((option) => { option.hidden = option.disabled = !both; });
  if (isOther && !restored.has("text-colour")) $("text-colour").value = both ? 2 : 0;
  const box = tokenBox("The text", scored);
  scored.tokens.forEach((row) => addToken(box, row));
  $("scored").replaceChildren(box);
  $("next").disabled = Boolean(asked.text) || (asked.passage ?? 1) >= scored.n_passages;
  paintText();
  summarise(asked);
  $("bands").replaceChildren(...bandList());
  const worst = () => scored.tokens.reduce((worst, row) => (row.losses[0] > worst.losses[0] ? row : worst));
  if (scored.tokens.length) choose(scored, scored.tokens[taken("text-at")?.[0]] ?? worst());
}

function paintText() {
  const which = Number($("text-colour").value), names = scored?.names ?? [];
  for (const { span, losses } of scored?.tokens ?? []) {
    const difference = losses[1] - losses[0];
    const [name, share] = which < names.length ? [names[which], losses[which] / 8] : [names[difference > 0 ? 0 : 1], Math.abs(difference) / 2];
    span.style.background = faded(color(name), share);
  }
  const better = (name) => scale("equal", `${short(name)} better by 2 nats`, color(name));
  $("text-scale").replaceChildren(...(which < names.length ? [scale("0", "8 nats", color(names[which]))] : names.map(better)));
}

function summarise(asked) {
  const means = scored.names.map((name, i) => {
    const total = scored.tokens.reduce((sum, row) => sum + row.losses[i], 0);
    return `${short(name)} ${fixed(total / scored.tokens.length)} nats per token, ${fixed(total / Math.LN2 / scored.n_bytes)} bits per byte`;
  });
  const place = asked.text ? "Your text" : `Passage ${asked.passage ?? 1} of ${grouped(scored.n_passages)} of the validation text`;
  $("text-summary").textContent = `${place}, ${grouped(scored.tokens.length)} tokens: ${means.join("; ")}.`;
}

function bandList() {
  const title = el("h2", {}, "Loss by frequency in the training text"), [first, second] = scored.bands;
  const largest = Math.max(...scored.bands.flat().map(({ loss }) => loss));
  const better = (a, b) => `: ${short(scored.names[a < b ? 0 : 1])} better by ${fixed(Math.abs(a - b))}`;
  const band = ({ least, most, tokens, loss }, k) => {
    const facts = `seen ${compact.format(least)} to ${compact.format(most)} times, ${grouped(tokens)} tokens here${second ? better(loss, second[k].loss) : ""}`;
    return [el("p", { className: "soft" }, facts), bars(scored.names.map((name, i) => ({ label: short(name), share: scored.bands[i][k].loss / largest, value: fixed(scored.bands[i][k].loss), color: color(name) })))];
  };
  return [title, ...(first ? first.flatMap(band) : [unknown()])];
}

function showToken(shown) {
  const { label, count, losses } = shown;
  const rows = losses.map((loss, i) => ({ label: short(scored.names[i]), share: loss / 10, value: `${fixed(loss)} nats`, color: color(scored.names[i]) }));
  const seen = count === null ? "" : `, seen ${grouped(count)} times in the training text`;
  $("token").replaceChildren(el("p", {}, el("code", {}, quoted(label)), seen), bars(rows));
  $("token").hidden = false;
  if (shown === scored.chosen) keepAddress();
}

// --- charts

function shape(tag, { style = {}, ...attributes }, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  Object.assign(element.style, style);
  Object.entries(attributes).forEach(([name, value]) => element.setAttribute(name, value));
  element.textContent = text;
  return element;
}

const range = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);

function ticks(low, high) {
  const raw = (high - low) / 6 || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= raw * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.max(0, Math.floor(high / step + 1e-9) - first + 1) }, (_, i) => (first + i) * step);
}

// series: {name, dashes, points: [[x, y]]}. Curves have a cursor, which the pointer or the arrow keys move.
function chart(series, { title, x, y, width = 480 }) {
  const [height, left, right, top, bottom] = [260, 46, 12, 26, 38], shown = series.filter(({ points }) => points.length);
  const all = shown.flatMap(({ points }) => points);
  if (!all.length) return "";
  const [start, end] = range([0, ...all.map((point) => point[0])]);
  const late = all.filter((point) => point[0] >= end / 10); // the first losses are far above the others
  const [low, high] = range((late.length ? late : all).map((point) => point[1]));
  const atX = (value) => left + ((width - left - right) * (value - start)) / (end - start || 1);
  const atY = (value) => height - bottom - ((height - top - bottom) * (Math.min(value, high) - low)) / (high - low || 1);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  const write = (x, y, anchor, text) => svg.append(shape("text", { x, y, "text-anchor": anchor }, text));
  for (const value of ticks(start, end)) write(atX(value), height - bottom + 15, "middle", compact.format(value));
  for (const value of ticks(low, high)) {
    svg.append(shape("line", { class: "grid", x1: left, x2: width - right, y1: atY(value), y2: atY(value) }));
    write(left - 5, atY(value) + 4, "end", compact.format(value));
  }
  write(left, 14, "start", y);
  write(width - right, height - 4, "end", x);
  for (const { name, dashes, points } of shown) {
    const places = points.map((point) => [atX(point[0]), atY(point[1])]), ink = color(name);
    if (places.length === 1) places.forEach(([cx, cy]) => svg.append(shape("circle", { cx, cy, r: 2.2, style: { fill: ink }, opacity: 0.75 })));
    else svg.append(shape("polyline", { points: places.join(" "), style: { stroke: ink, fill: "none" }, "stroke-width": 1.8, "stroke-dasharray": DASHES[dashes] }));
  }
  const box = el("div", { className: "chart" }, svg);
  addCursor(box, svg, shown, { atX, width, height, top, bottom });
  return box;
}

function addCursor(box, svg, series, { atX, width, height, top, bottom }) {
  const stops = [...new Set(series.flatMap(({ points }) => points.map((point) => point[0])))].sort((a, b) => a - b);
  const line = shape("line", { class: "grid", y1: top, y2: height - bottom, x1: -1, x2: -1 }), tip = el("div", { className: "tip", hidden: true });
  let here = stops.length - 1;
  svg.prepend(line);
  box.append(tip);
  box.tabIndex = 0;
  const nearest = (points, x) => points.reduce((best, point) => (Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best));
  const point = (index) => {
    here = Math.max(0, Math.min(stops.length - 1, index));
    const x = stops[here], at = atX(x);
    ["x1", "x2"].forEach((end) => line.setAttribute(end, at));
    const values = series.filter(({ points }) => x <= points.at(-1)[0]).map(({ name, points }) => [name, nearest(points, x)[1]]);
    const rows = values.sort((a, b) => b[1] - a[1]).map(([name, value]) => el("div", {}, el("span", {}, swatch(name), short(name)), fixed(value)));
    tip.replaceChildren(`${compact.format(x)} tokens`, ...rows.slice(-12));
    const share = at / width;
    Object.assign(tip.style, share < 0.5 ? { left: `calc(${100 * share}% + 8px)`, right: "" } : { right: `calc(${100 - 100 * share}% + 8px)`, left: "" });
    tip.hidden = false;
  };
  box.addEventListener("pointermove", (event) => {
    const { left, width: shownWidth } = svg.getBoundingClientRect(), x = ((event.clientX - left) / shownWidth) * width;
    point(stops.reduce((best, stop, i) => (Math.abs(atX(stop) - x) < Math.abs(atX(stops[best]) - x) ? i : best), 0));
  });
  box.addEventListener("pointerleave", () => { tip.hidden = true; });
  box.addEventListener("focus", () => point(here));
  box.addEventListener("blur", () => { tip.hidden = true; });
  box.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) { point(here + step); event.preventDefault(); }
  });
}

// --- runs

async function poll() {
  try {
    const response = document.hidden ? null : await fetch("/runs"), text = await response?.text();
    if ($("message").textContent === GONE) $("message").textContent = "";
    if (response && !response.ok) $("message").textContent = JSON.parse(text).error;
    else if (text && text !== poll.before) listRuns(JSON.parse(text));
    poll.before = text ?? poll.before;
  } catch (error) { $("message").textContent = error instanceof TypeError ? GONE : error.message; }
  setTimeout(poll, POLL);
}

function listRuns(answer) {
  runs = answer.runs;
  labels = shortened(runs.map((run) => run.name));
  offerModels(runs.filter((run) => run.has_model).map((run) => run.name), Boolean(answer.ablation));
  $("ablation").replaceChildren(...(answer.ablation ? ablationSummary(answer.ablation) : []));
  if (!$("runs").hidden) drawRuns();
}

function drawRuns() {
  const focused = document.activeElement?.id, texts = [...new Set(runs.map((run) => run.data_hash))];
  const groups = texts.map((hash) => runGroup(runs.filter((run) => run.data_hash === hash), texts.length > 1));
  $("list").replaceChildren(...(runs.length ? groups.flat() : [el("p", {}, "There are no runs yet. Train one: lm-lab train my.txt")]));
  if (focused) $(focused)?.focus();
}

// The runs of one text: their curves, in bits per byte if their tokenizers differ, and a row for each.
function runGroup(group, several) {
  const differ = new Set(group.filter((run) => run.curve.length).map((run) => run.tokenizer_hash)).size > 1, column = differ ? 2 : 1;
  const series = group.map(({ name, dashes, curve }) => ({ name, dashes, points: curve.map((point) => [point[0], point[column]]).filter((point) => point[1] !== null) }));
  const y = differ ? "validation loss, bits per byte" : "validation loss, nats per token";
  const axes = { title: "Validation loss of the runs", x: "training tokens", y, width: Math.max(320, $("list").clientWidth) };
  const head = ["run", "", "bits per byte#", "val loss#", "status", "parameters#"];
  const cell = (text) => el("th", { className: text.endsWith("#") ? "number" : "" }, text.replace("#", ""));
  const table = el("table", {}, el("tr", {}, ...head.map(cell)), ...group.map(runRow));
  const title = several && group[0].text ? [el("h2", {}, `Text: ${group[0].text}`)] : [];
  return [...title, chart(series, axes), el("div", { className: "scroll", tabIndex: 0 }, table)];
}

function runRow({ name, status, note, has_model, val_loss, val_bpb, n_params }) {
  const hint = has_model ? "" : "It has no model and no checkpoint yet";
  const button = (text, select) => el("button", { id: `${select} ${name}`, disabled: !has_model, title: hint, ariaLabel: `${text} ${name}`, onclick: () => { $(select).value = name; changeModels(); show("prompt"); } }, text);
  const number = (text) => el("td", { className: "number" }, text);
  return el("tr", {}, el("td", { className: "name", title: name }, swatch(name), short(name)),
    el("td", {}, button("Open", "first"), button("Beside", "second")),
    number(fixed(val_bpb, 4)), number(fixed(val_loss, 4)), el("td", {}, note ? `${status}: ${note}` : status), number(n_params ? grouped(n_params) : ""));
}

function ablationSummary({ question, answers, left, warnings }) {
  const statement = ({ verdict, statement }) => {
    const [head, ...rest] = statement.split(":");
    return el("p", {}, el("strong", { className: verdict }, rest.length ? `${head}:` : head), rest.join(":"));
  };
  const link = el("a", { href: "/report" }, "The whole report");
  const weak = warnings.length ? [el("ul", { className: "warnings" }, ...warnings.map((text) => el("li", {}, text)))] : [];
  return [el("h2", {}, question), el("div", { className: "answer" }, ...answers.map(statement), el("p", { className: "soft" }, `${left}. `, link)), ...weak];
}

// The choice stays while its model does; of two runs, both are chosen at first.
function offerModels(names, isAblation) {
  const before = [$("first").value, $("second").value], isFirst = !$("second").options.length;
  if (!isFirst && names.join("\n") === [...$("first").options].map((option) => option.value).join("\n")) return;
  const options = () => names.map((name) => el("option", { value: name, title: name }, short(name)));
  const [first, second] = isFirst ? [restored.get("first"), restored.get("second") ?? (names.length === 2 ? names[1] : "")] : before;
  $("first").replaceChildren(...options());
  $("second").replaceChildren(el("option", { value: "" }, "none"), ...options());
  if (names.includes(first)) $("first").value = first;
  $("second").value = names.includes(second) ? second : "";
  if (isFirst) open(names.length && !isAblation ? "prompt" : "runs");
  else if (before[0] !== $("first").value) changeModels();
}

// --- views

const current = () => VIEWS.find((name) => !$(name).hidden);

function show(view) {
  VIEWS.forEach((name) => {
    $(name).hidden = name !== view;
    $(`tab-${name}`).ariaSelected = String(name === view);
    $(`tab-${name}`).tabIndex = name === view ? 0 : -1;
  });
  if (view === "runs") drawRuns();
  else if (!answered.has(view) && chosen().length) ask(view);
  keepAddress();
}

function changeModels() {
  restored = new URLSearchParams();
  answered.clear();
  branch.clear();
  if (current() && current() !== "runs") show(current());
}

// --- the address holds the whole view: which one, the models, what differs from the defaults, the branch, the tokens

let restored = new URLSearchParams(); // what of the address no view has taken yet
const numbers = (words) => words?.split(" ").map(Number);
const PLACES = { // numbers that are no fields
  at: () => (continued?.chosen ? [continued.chosen.model, continued.chosen.index] : []),
  "attention-at": () => (attended.every((state) => state.tokens) ? attended.flatMap(({ position, head }) => [position, head]) : []),
  "text-at": () => (scored?.chosen ? [scored.tokens.indexOf(scored.chosen)] : []),
};

function taken(key) {
  const values = numbers(restored.get(key));
  restored.delete(key);
  return values;
}

const ALWAYS = ["first", "second", "prompt-form.prompt", "attention-form.text"];
const fields = () => new Map([...document.querySelectorAll("[name]:not(meta), select")].map((field) => [field.id || `${field.form.id}.${field.name}`, field]));

function keepAddress() {
  if (!current() || !$("second").options.length) return; // the models are not known yet
  const params = new URLSearchParams();
  for (const [key, field] of fields()) {
    const usual = field.options ? field.options[0]?.value : field.defaultValue;
    if (ALWAYS.includes(key) || field.value !== usual) params.set(key, field.value);
  }
  if (branch.forced.length) params.set("forced", [branch.of, ...branch.forced].join(" "));
  for (const [key, value] of Object.entries(PLACES)) {
    const words = restored.get(key) ?? value().join(" ");
    if (words) params.set(key, words);
  }
  history.replaceState(null, "", `#${current()}&${params}`);
}

async function open(usual) {
  const [view, ...rest] = location.hash.slice(1).split("&");
  for (const [key, field] of fields()) if (restored.has(key) && !["first", "second"].includes(key)) field.value = restored.get(key);
  if (restored.has("forced")) [branch.of, ...branch.forced] = restored.get("forced").split(" ").map(Number);
  if (chosen().length && !restored.has("prompt-form.prompt")) {
    $("message").textContent = "Reading the validation text of the run";
    $(VIEWS.includes(view) ? view : usual).hidden = false;
    try {
      const { prompt, text } = await (await post("/opening", { runs: chosen() })).json();
      for (const [key, value] of [["prompt-form.prompt", prompt], ["attention-form.text", text]]) {
        if (!restored.has(key)) fields().get(key).value = value;
      }
      $("message").textContent = "";
    } catch (error) { $("message").textContent = error.message; }
  }
  show(VIEWS.includes(view) ? view : usual);
}

roving(document.querySelector("[role=tablist]"), "[role=tab]", ["ArrowLeft", "ArrowRight"]);
VIEWS.forEach((name) => {
  $(`tab-${name}`).addEventListener("click", () => show(name));
  $(`tab-${name}`).addEventListener("focus", () => current() && show(name));
});
Object.keys(ANSWERS).forEach((view) => {
  const form = $(`${view}-form`);
  form.addEventListener("keydown", (event) => event.ctrlKey && event.key === "Enter" && form.requestSubmit());
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (view === "prompt") branch.clear();
    ask(view);
  });
});
["first", "second"].forEach((id) => $(id).addEventListener("change", changeModels));
$("stop").addEventListener("click", () => streaming.abort());
$("back").addEventListener("click", () => { branch.takeBack(); ask("prompt"); });
$("next").addEventListener("click", () => { $("text-form").elements.passage.valueAsNumber += 1; ask("text"); });
$("prompt-colour").addEventListener("change", () => { continued?.steps.flat().forEach((row) => paintStep(continued, row)); showPromptScale(); keepAddress(); });
$("text-colour").addEventListener("change", () => { paintText(); keepAddress(); });
addEventListener("resize", () => !$("runs").hidden && drawRuns());
addEventListener("hashchange", () => location.reload()); // another address was typed; keepAddress() causes no event
restored = new URLSearchParams(location.hash.slice(1).replace(/^\w*&?/, ""));
poll();

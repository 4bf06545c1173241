// Runs: the list and the curves of the runs, read again every two seconds.

const POLL = 2000; // milliseconds
const GONE = "The program does not answer; it may have been ended in its terminal.";

async function poll() {
  try {
    const response = document.hidden ? null : await fetch("/runs").catch(() => Promise.reject(new Error(GONE)));
    const text = await response?.text();
    if ($("message").textContent === GONE) $("message").textContent = "";
    if (response && !response.ok) $("message").textContent = JSON.parse(text).error;
    else if (text && text !== poll.before) listRuns(JSON.parse(text));
    poll.before = text ?? poll.before;
  } catch (error) {
    $("message").textContent = error.message;
  }
  setTimeout(poll, POLL);
}

function listRuns(answer) {
  runs = answer.runs;
  labels = shortened(runs.map((run) => run.name));
  offerModels(runs.filter((run) => run.has_model).map((run) => run.name));
  if (!$("runs").hidden) drawRuns();
}

function drawRuns() {
  const focused = document.activeElement?.id;
  const scrolled = [...$("list").querySelectorAll(".scroll")].map(({ id, scrollLeft }) => [id, scrollLeft]);
  const texts = [...new Set(runs.map((run) => run.data_hash))];
  const groups = texts.flatMap((text) => runGroup(runs.filter((run) => run.data_hash === text), texts.length > 1));
  const none = el("p", {}, "There are no runs yet. Train one: lm-lab train my.txt");
  $("list").replaceChildren(...(runs.length ? groups : [none]));
  scrolled.forEach(([id, left]) => $(id)?.scrollTo(left, 0)); // a list that grows keeps what its reader sees
  if (focused) $(focused)?.focus({ preventScroll: true });
}

// The runs of one text: their curves, in bits per byte if their tokenizers differ, and a row for each run.
function runGroup(group, isOneOfSeveral) {
  const tokenizers = new Set(group.filter((run) => run.curve.length).map((run) => run.tokenizer_hash));
  const [column, unit] = tokenizers.size > 1 ? [2, "bits per byte"] : [1, "nats per token"];
  const points = (run) => run.curve.map((point) => [point[0], point[column]]).filter((point) => point[1] !== null);
  const curves = group.map((run) => ({ ...run, points: points(run) })).filter((run) => run.points.length);
  const width = Math.max(320, $("list").clientWidth);
  const text = group[0].data_hash;
  const axes = { id: `chart ${text}`, title: "Validation loss of the runs", y: `validation loss, ${unit}`, width };
  const table = el("table", {}, tableHead(), ...group.map(runRow));
  return [
    ...(isOneOfSeveral && group[0].text ? [el("h2", {}, `Text: ${group[0].text}`)] : []),
    ...(curves.length ? [chart(curves, axes)] : []),
    el("div", { id: `table ${text}`, className: "scroll", tabIndex: 0 }, table),
  ];
}

function tableHead() {
  const numbers = ["bits per byte", "val loss", "parameters"];
  const head = ["run", "", "bits per byte", "val loss", "status", "parameters"];
  return el("tr", {}, ...head.map((text) => el("th", { className: numbers.includes(text) ? "number" : "" }, text)));
}

function runRow({ name, status, note, has_model, val_loss, val_bpb, n_params }) {
  const button = (text, select) => {
    const title = has_model ? "" : "It has no model yet";
    const onclick = () => {
      $(select).value = name;
      changeModels();
      show("prompt");
    };
    return el("button", { id: `${select} ${name}`, disabled: !has_model, title, ariaLabel: `${text} ${name}`, onclick }, text);
  };
  const number = (text) => el("td", { className: "number" }, text);
  return el(
    "tr",
    {},
    el("td", { className: "name", title: name }, swatch(name), short(name)),
    el("td", {}, button("Open", "first"), button("Beside", "second")),
    number(fixed(val_bpb, 4)),
    number(fixed(val_loss, 4)),
    el("td", {}, note ? `${status}: ${note}` : status),
    number(n_params ? grouped(n_params) : ""),
  );
}

// The page: its four views, the models that it shows, and what begins when something is pressed.

const VIEWS = ["prompt", "attention", "text", "runs"];
const ANSWERS = { prompt: continuePrompt, attention: showAttention, text: scoreText };
const NO_MODEL = "There is no model yet. Train one: lm-lab train my.txt";
const answered = new Set(); // views that show the answer for the chosen models
const [startView, ...startWords] = location.hash.slice(1).split("&");
const startModels = new URLSearchParams(startWords.join("&"));

const showError = (error) => { $("message").textContent = error.message; };

async function ask(view) {
  const form = $(`${view}-form`);
  $("message").textContent = chosenModels().length ? "" : NO_MODEL;
  if (!chosenModels().length) return;
  form.ariaBusy = "true";
  answered.add(view);
  try {
    await ANSWERS[view](form);
  } catch (error) {
    if (error.name !== "AbortError") { // Stop, whose answer stays, or a newer question ended this question
      answered.delete(view); // asked again when the view is shown again
      showError(error);
    }
  }
  form.ariaBusy = "false";
}

const currentView = () => VIEWS.find((name) => !$(name).hidden);

function show(view) {
  VIEWS.forEach((name) => {
    $(name).hidden = name !== view;
    $(`tab-${name}`).ariaSelected = String(name === view);
    $(`tab-${name}`).tabIndex = name === view ? 0 : -1;
  });
  if (view === "runs") drawRuns();
  else if (!answered.has(view) && chosenModels().length) ask(view);
  keepAddress();
}

function keepAddress() {
  const models = new URLSearchParams({ first: $("first").value, second: $("second").value });
  history.replaceState(null, "", `#${currentView()}&${models}`);
}

// --- the models

// Offer these models. A choice stays as long as its model is there; of two runs, both are chosen at first.
function offerModels(names) {
  const isFirst = !$("second").options.length;
  const offered = [...$("first").options].map((option) => option.value);
  if (!isFirst && names.join("\n") === offered.join("\n")) return;
  const start = { first: startModels.get("first"), second: startModels.get("second") ?? (names.length === 2 ? names[1] : "") };
  const before = isFirst ? start : { first: $("first").value, second: $("second").value };
  const options = () => names.map((name) => el("option", { value: name, title: name }, short(name)));
  $("first").replaceChildren(...options());
  $("second").replaceChildren(el("option", { value: "" }, "none"), ...options());
  if (names.includes(before.first)) $("first").value = before.first;
  $("second").value = names.includes(before.second) ? before.second : "";
  if (isFirst) open(names.length ? "prompt" : "runs");
  else if (before.first !== $("first").value) changeModels();
}

async function changeModels() {
  answered.clear();
  branch.clear();
  await fillPrompt();
  if (currentView() && currentView() !== "runs") show(currentView());
  else keepAddress();
}

// Open the page with something on it: a line of the validation text, continued.
async function open(usual) {
  const view = VIEWS.includes(startView) ? startView : usual;
  $(view).hidden = false;
  await fillPrompt();
  show(currentView());
}

// Fill the fields that are empty with the validation text of the first model, once there is a model.
async function fillPrompt() {
  const [prompt, text] = [$("prompt-form").elements.prompt, $("attention-form").elements.text];
  if (!chosenModels().length || (prompt.value && text.value)) return;
  $("message").textContent = "Reading the validation text of the run";
  try {
    const opening = await (await post("/opening", { runs: chosenModels() })).json();
    prompt.value ||= opening.prompt;
    text.value ||= opening.text;
    $("message").textContent = "";
  } catch (error) {
    showError(error);
  }
}

// --- what is pressed

roving(document.querySelector("[role=tablist]"), "[role=tab]", ["ArrowLeft", "ArrowRight"]);
VIEWS.forEach((name) => {
  $(`tab-${name}`).addEventListener("click", () => show(name));
  $(`tab-${name}`).addEventListener("focus", () => currentView() && show(name));
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
$("stop").addEventListener("click", () => stream.abort());
$("back").addEventListener("click", () => {
  branch.takeBack($("prompt-form").elements.prompt);
  ask("prompt");
});
$("next").addEventListener("click", () => {
  $("text-form").elements.passage.valueAsNumber += 1;
  ask("text");
});
$("text-colour").addEventListener("change", paintText);
addEventListener("resize", () => !$("runs").hidden && drawRuns());
addEventListener("hashchange", () => location.reload()); // another address was typed: keepAddress causes no event
poll();

"use strict";

// One page for two sites: visits to the shop, and recorded episodes. Everything that is shown was written by strangers
// (a catalogue, a model), so nothing is ever put in as HTML: elements are made here, and text is set as text.

const at = (id) => document.getElementById(id);

function make(tag, text = "", className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (className) element.className = className;
  return element;
}

const fill = (id, elements) => at(id).replaceChildren(...elements);
const write = (id, text) => { at(id).textContent = text; };
const show = (id, shown) => { at(id).hidden = !shown; };

async function ask(path, body) {
  const request = body === undefined ? {} : {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  };
  let response;
  try {
    response = await fetch(`/api/${path}`, request);
  } catch {
    throw new Error("The shop does not answer. Is megagent shop still running?");
  }
  const answer = await response.json();
  if (!response.ok) throw Object.assign(new Error(answer.error), { status: response.status });
  return answer;
}

// Runs one request at a time: while it is under way nothing else can be clicked.
let busy = false;
async function during(work) {
  if (busy) return;
  busy = true;
  document.body.setAttribute("aria-busy", "true");
  try {
    await work();
    write("message", "");
  } catch (error) {
    write("message", error.message);
  } finally {
    busy = false;
    document.body.removeAttribute("aria-busy");
  }
}

// ---- a visit to the shop ----

const VISIT = "megagent-visit"; // each tab has a visit of its own, and keeps it when it is loaded again
let visit = null;

const act = (action) => during(async () => showVisit(await ask(`visits/${visit}/actions`, { action })));
const start = (task) => during(async () => showVisit(await ask("visits", { task }))); // "first", "another" or a number

function clickable(button) {
  const element = make("button", button.label, button.selected ? "selected" : "");
  element.type = "button";
  element.dataset.action = button.action;
  element.setAttribute("aria-pressed", button.selected);
  element.addEventListener("click", () => act(button.action));
  return element;
}

function optionRow(row) {
  const element = make("div", "", "row");
  element.append(make("strong", row.name), ...row.buttons.map(clickable));
  return element;
}

function offer(product) {
  const element = make("li");
  element.append(clickable(product.button), make("span", product.title), make("span", product.price, "price"));
  return element;
}

function showVisit(answer) {
  visit = answer.visit;
  sessionStorage.setItem(VISIT, visit);
  const { page } = answer;
  write("instruction", answer.task);
  at("task-number").value = answer.number;
  write("heading", page.heading);
  fill("texts", page.texts.map((text) => make("p", text)));
  show("search", page.has_search_box);
  at("query").value = "";
  // After a purchase the original's page would offer the next visit's buttons.
  const open = answer.outcome === null;
  fill("buttons", open ? page.buttons.map(clickable) : []);
  fill("options", open ? page.options.map(optionRow) : []);
  fill("offers", open ? page.offers.map(offer) : []);
  write("step", open ? `step ${answer.steps + 1}; it has ${answer.max_steps}` : "");
  write("observation", answer.observation);
  show("admissible-part", open);
  fill("admissible", answer.admissible.map((action) => make("li", action)));
  const moves = answer.moves.map((move) => make("li", move.action, move.admissible ? "" : "refused"));
  fill("moves", moves);
  at("moves").start = answer.steps - moves.length + 1;
  showOutcome(answer.outcome);
  window.scrollTo(0, 0);
}

function showOutcome(outcome) {
  show("outcome", outcome !== null);
  if (outcome === null) return;
  const verdict = outcome.won ? "won: all that was asked for" : "not won: a win takes the whole score";
  write("verdict", `Score ${outcome.score.toFixed(3)} of 1 (${verdict})`);
  at("outcome").className = outcome.won ? "won" : "lost";
  const rows = outcome.parts.map((part) => {
    const row = make("tr");
    const share = part.share === null ? "" : part.share.toFixed(3);
    row.append(...[part.component, part.met, share, part.sentence].map((text) => make("td", text)));
    return row;
  });
  at("parts").tBodies[0].replaceChildren(...rows);
  show("parts", true);
}

async function openShop(site) {
  write("panel", `${site.panel} panel, ${site.tasks} tasks`);
  at("task-number").max = site.tasks - 1;
  show("shop-controls", true);
  at("new-task").addEventListener("click", () => start("another"));
  at("go-to-task").addEventListener("click", () => start(at("task-number").valueAsNumber));
  at("search").addEventListener("submit", (event) => {
    event.preventDefault();
    if (at("query").value.trim()) act(`search[${at("query").value}]`);
  });
  const kept = sessionStorage.getItem(VISIT);
  try {
    showVisit(kept ? await ask(`visits/${kept}`) : await ask("visits", { task: "first" }));
  } catch (error) {
    if (error.status !== 404) throw error;
    showVisit(await ask("visits", { task: "first" })); // the shop has forgotten the visit
  }
}

// ---- recorded episodes ----

let episode = null;
let place = 0; // the step that is shown

function showStep() {
  const step = episode.steps[place];
  const last = place >= episode.steps.length - 1;
  write("place", episode.steps.length ? `step ${place + 1} of ${episode.steps.length}` : "no steps");
  at("earlier").disabled = place === 0;
  at("later").disabled = last;
  write("instruction", episode.instruction);
  show("outcome", last);
  write("verdict", episode.verdict);
  at("outcome").className = episode.won ? "won" : "lost";
  fill("moves", episode.steps.slice(0, place + 1).map((done) => make("li", done.action, done.fault ? "refused" : "")));
  if (!step) return;
  const clicked = step.action.replace(/^click\[(.*)\]$/s, "$1");
  const look = (text) => (text.includes("\n") ? "block" : text.toLowerCase() === clicked ? "clicked" : "");
  write("heading", `Action: ${step.action}${step.fault && ` (${step.fault})`}`);
  fill("texts", step.segments.map((text) => make("p", text, look(text))));
  write("step", step.reward ? `reward ${step.reward}` : "");
  write("observation", step.prompt || step.page);
  write("reply", step.response);
}

const pick = (number) => during(async () => {
  episode = await ask(`episodes/${number}`);
  place = 0;
  showStep();
});

function turn(by) {
  if (episode === null) return;
  place = Math.max(0, Math.min(episode.steps.length - 1, place + by));
  showStep();
}

async function openReplay(site) {
  write("kind", `replay: ${site.title}`);
  show("replay-controls", true);
  show("reply-part", true);
  show("admissible-part", false);
  fill("episodes", site.episodes.map((each, number) => {
    const option = make("option", `${number + 1}: ${each.won ? "won" : "not won"}: ${each.instruction}`);
    option.value = number;
    return option;
  }));
  at("episodes").addEventListener("change", () => pick(at("episodes").value));
  at("earlier").addEventListener("click", () => turn(-1));
  at("later").addEventListener("click", () => turn(1));
  document.addEventListener("keydown", (event) => {
    if (event.target.tagName === "SELECT") return;
    if (event.key === "ArrowLeft") turn(-1);
    if (event.key === "ArrowRight") turn(1);
  });
  episode = await ask("episodes/0");
  showStep();
}

during(async () => {
  const site = await ask("site");
  await (site.kind === "replay" ? openReplay(site) : openShop(site));
  document.body.dataset.ready = site.kind;
});

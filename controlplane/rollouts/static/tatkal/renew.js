// Keeps the part of a page that is marked with data-renew="SECONDS" as the server has it, without a reload: what is
// open stays open, what has the focus keeps it, and the place on the page is kept. It ends when the mark is gone.
(() => {
  "use strict";
  const TIMEOUT_MS = 10_000;

  // A part of the page is known by its id; a button by what it sends or where it leads.
  const nameOf = (element) => element.id || element.getAttribute("href") || element.closest("form")?.getAttribute("action") || "";

  // Every answer has another token for its forms; that alone is nothing new.
  const contentOf = (part) => part.innerHTML.replace(/(name="csrfmiddlewaretoken" value=)"[^"]*"/g, "$1");

  const isBusy = (part) => document.hidden || part.matches(":has(button:active, a:active)") || !getSelection().isCollapsed;

  const replace = (part, fresh) => {
    const wereOpen = new Map([...part.querySelectorAll("details[id]")].map((each) => [each.id, each.open]));
    const focused = part.contains(document.activeElement) ? nameOf(document.activeElement) : "";
    for (const each of fresh.querySelectorAll("details[id]")) {
      if (wereOpen.has(each.id)) each.open = wereOpen.get(each.id);
    }
    if (contentOf(part) === contentOf(fresh)) return;
    part.replaceWith(fresh);
    if (focused === "") return;
    const again = [...fresh.querySelectorAll("a, button, summary, input")].find((each) => nameOf(each) === focused);
    again?.focus({ preventScroll: true });
  };

  const renew = async () => {
    const part = document.querySelector("[data-renew]");
    if (part === null) return;
    if (!isBusy(part)) {
      try {
        const response = await fetch(location.href, { signal: AbortSignal.timeout(TIMEOUT_MS) });
        if (response.redirected) return location.reload(); // to the login
        if (response.ok) {
          const page = new DOMParser().parseFromString(await response.text(), "text/html");
          const fresh = page.getElementById(part.id);
          if (fresh !== null && !isBusy(part)) replace(part, fresh);
        }
        part.classList.toggle("tatkal-stale", !response.ok);
      } catch {
        part.classList.add("tatkal-stale");
      }
    }
    schedule();
  };

  const schedule = () => {
    const seconds = Number(document.querySelector("[data-renew]")?.dataset.renew);
    if (seconds > 0) setTimeout(renew, seconds * 1000);
  };

  document.addEventListener("DOMContentLoaded", schedule);
})();
